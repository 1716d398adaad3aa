"""`engram-lab app`: the options of the server, checked before it starts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NoReturn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `engram-lab app` takes."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine)")
    parser.add_argument("--port", type=int, default=8501, help="port, 0 for any free one (default %(default)s)")
    parser.add_argument(
        "--password-file", type=Path, metavar="FILE",
        help="ask for the password in the file's first line, with any user name; the network can read it unless a "
        "proxy with TLS stands in front",
    )  # fmt: skip
    parser.add_argument(
        "--login-header", metavar="NAME",
        help="let in only requests with this header, for instance X-Forwarded-User, which a proxy sets for users it "
        "has logged in; the proxy must take it out of what clients send, and clients must not reach this port",
    )  # fmt: skip
    parser.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME",
        help="a name that the app is reached by, beside IP addresses, localhost and this machine's own name; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument("--device", help="what models run on: cpu or cuda (default: the best there is)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument(
        "--models", type=int, metavar="N", help="how many models stay in memory for all users (default 3)"
    )
    parser.add_argument(
        "--store", metavar="URL", help="where sessions are kept, for instance postgresql://... (default: a file)"
    )


def run(args: argparse.Namespace) -> NoReturn:
    """Serve the app until it is stopped."""
    from engram_lab.lab.app import access, server
    from engram_lab.models.errors import LabError

    if args.models is not None and args.models < 1:
        raise LabError(f"--models is {args.models}; a server keeps at least 1 model in memory.")
    if args.login_header is not None and not re.fullmatch(r"[A-Za-z0-9-]+", args.login_header):
        raise LabError(f'--login-header is "{args.login_header}": give the name of a header, such as X-Forwarded-User.')
    for name in args.allowed_host:
        if not re.fullmatch(r"[A-Za-z0-9.-]+", name):
            raise LabError(f'--allowed-host is "{name}": give a name alone, such as lab.example.org.')
    password = None
    if args.password_file is not None:
        password = access.read_password(args.password_file)
        if access.is_readable_by_others(args.password_file):
            file = args.password_file
            print(f"Warning: others on this machine can read {file}: chmod 600 {file}", file=sys.stderr)
    if args.store is not None:
        from engram_lab.lab.sessions import open_store

        open_store(args.store).dispose()  # refuses what it cannot use, before anyone waits for it
        os.environ["ENGRAM_LAB_STORE"] = args.store
    server.main(
        args.host,
        args.port,
        server.Access(password, args.login_header, tuple(args.allowed_host)),
        {"device": args.device, "dtype": args.dtype, "models": args.models},
    )
