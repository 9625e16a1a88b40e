"""What a reshard costs besides the time on the network: memory, CPU time, calls, and copies inside a host."""
