"""The command line. Each command is a module with ``run(argv) -> int``, imported only when it is typed."""

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
