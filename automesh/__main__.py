"""`python -m automesh` is the command `automesh`."""

from automesh.cli.app import main

if __name__ == "__main__":
    main()
