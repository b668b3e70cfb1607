"""What the command line and the benches share: tables, progress, and a quiet end when a reader goes away."""
