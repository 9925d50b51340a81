"""The command line: one module with ``run(argv) -> int`` per command, imported only when it is used."""

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
