"""What the packages of tests/clients move by themselves, beside the same through meshcast."""
