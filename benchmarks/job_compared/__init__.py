"""One training whose workers are killed, kept going in three ways: beside each other over time."""
