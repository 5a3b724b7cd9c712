"""`python -m frame`: the command line, where the console script is not on the path."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working folder, whose modules must not be imported from here on

from frame.entrypoints.cli.entry import main

if __name__ == "__main__":
    main()
