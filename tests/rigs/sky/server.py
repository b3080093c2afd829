"""The account's process, in the rig's namespace: AWS's interfaces, the metadata service and the control port.

Usage: python -m tests.rigs.sky.server CONFIG, JSON with `folder`, `image`, `home`, `binds`, `links`. Says "ready".
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

from moto.server import ThreadedMotoServer
from werkzeug.serving import make_server

from tests.rigs.sky.account import AWS_PORT, furnish
from tests.rigs.sky.cloud import Cloud, install
from tests.rigs.sky.control import control_app
from tests.rigs.sky.machine import Hardware
from tests.rigs.sky.metadata import metadata_app
from tests.rigs.sky.network import HOST_ADDRESS, METADATA_ADDRESS

CONTROL_PORT = 5601


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    folder, image, home = (Path(config[name]) for name in ("folder", "image", "home"))
    binds = tuple(Path(bind) for bind in config["binds"])
    hardware = Hardware(folder, image, binds, config["links"], home)
    cloud = Cloud(hardware)
    install(cloud)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    ThreadedMotoServer(HOST_ADDRESS, AWS_PORT, verbose=False).start()
    _serve(METADATA_ADDRESS, 80, metadata_app(cloud))
    _serve("127.0.0.1", CONTROL_PORT, control_app(cloud))
    furnish()
    print("ready", flush=True)
    threading.Event().wait()


def _serve(host: str, port: int, app: Any) -> None:
    server = make_server(host, port, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


if __name__ == "__main__":
    main()
