"""Pipeline schedules on an emulated cluster: measured against simulated, and beside torch's own schedules."""
