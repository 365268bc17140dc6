"""The tests: one module for each module of the library, `scenarios/` for those that need several processes."""
