"""The sub-commands of `rawattn`. Each is a module with `add_parser(subparsers)` and `run(args)`."""
