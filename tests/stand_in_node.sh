#!/bin/sh
# Stands in for the node environment's Python where a test wants a machine but not its work.
if [ -n "$STAND_IN_EXIT" ]; then exit "$STAND_IN_EXIT"; fi
sleep 600 &
exec sleep 600
