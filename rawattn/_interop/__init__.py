"""Arrays of any framework, in and out: views, DLPack capsules, streams."""
