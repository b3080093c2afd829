"""S3 servers that tests start, and a proxy that breaks them on command. All bind 127.0.0.1 and end with them."""
