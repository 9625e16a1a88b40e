"""Pipelines on an emulated cluster: schedules, cuts into stages, and whole trainings."""
