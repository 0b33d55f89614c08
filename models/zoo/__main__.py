"""``python -m models.zoo [NAME ...]``: export the models that are missing."""

from __future__ import annotations

import argparse
import sys
import time

from models.zoo import store


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.zoo", description="Export the zoo with torch.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every model")
    parser.add_argument("--list", action="store_true", help="only say what is there")
    arguments = parser.parse_args()
    names = arguments.names or list(store.NAMES)
    missing = [name for name in names if store.find(name) is None]
    if arguments.list:
        for name in names:
            print(f"{name:18}", "missing" if name in missing else "there")
        return
    for done, name in enumerate(missing, 1):
        start = time.perf_counter()
        # torch and transformers take seconds to import: only when there is something to export
        from models.zoo.export import export

        export(name)
        print(f"[{done}/{len(missing)}] {name} exported in {time.perf_counter() - start:.1f} s", flush=True)
    if not missing:
        print(f"zoo: {len(names)} models in {store.directory()}", file=sys.stderr)


if __name__ == "__main__":
    main()
