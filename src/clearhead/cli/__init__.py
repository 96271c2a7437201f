"""The command line: parsing only. Each command is one small file with `run(argv)`, which calls one function."""
