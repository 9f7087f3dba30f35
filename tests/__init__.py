"""Tests; a package, so that they can import what they share from modules beside them."""
