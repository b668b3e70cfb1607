"""Conversion of arrays between frameworks: views, DLPack capsules, streams."""
