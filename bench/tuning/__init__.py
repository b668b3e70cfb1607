"""The search for tile shapes behind bench/tune.py."""
