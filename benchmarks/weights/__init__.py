"""Weights and checkpoints that go to other ranks, by meshcast and by what others have for it."""
