"""Ranks of examples/elastic are killed at random moments: how soon the job goes on, and whether rightly."""
