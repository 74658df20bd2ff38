"""Tests; mirrors the packages, plus end_to_end/ and faults/."""
