"""`python -m frame`: the command line, where the console script is not on the path."""

from frame.entrypoints.cli.entry import main

if __name__ == "__main__":
    main()
