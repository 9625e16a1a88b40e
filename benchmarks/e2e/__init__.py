"""The paper's jobs on an emulated cluster: what each part of the method adds, measured beside simulated."""
