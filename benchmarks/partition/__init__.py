"""Cuts that `partition` proposes, measured beside obvious ones on an emulated cluster."""
