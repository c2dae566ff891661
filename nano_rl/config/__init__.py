"""Settings of trainings, and the TOML files that they are read from."""
