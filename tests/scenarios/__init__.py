"""Tests that start processes: kills, installs, several ranks."""
