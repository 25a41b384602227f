"""Runs a benchmark: `python -m bench NAME [ARGUMENT...]` calls `main` of `bench.measure_NAME`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    import_module(f"bench.measure_{sys.argv.pop(1)}").main()
