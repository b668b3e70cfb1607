"""The sub-commands of `rawattn`, a module each: `add_parser(subparsers)` and `run(args)`."""
