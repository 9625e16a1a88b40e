"""Measurements of meshcast against what people use today, on an emulated cluster."""
