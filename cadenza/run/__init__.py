"""What a run is made of: its config, its roles and workers, its engines, its directory, its commands."""
