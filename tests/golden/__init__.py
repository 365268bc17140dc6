"""Content written by released versions, which every later version must read."""
