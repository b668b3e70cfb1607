"""Console output of the command line and the benches: tables, progress, and a quiet end if the reader closes the pipe."""
