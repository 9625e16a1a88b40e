"""Plug-ins for packages that move weights: each is a module here, which imports its package, and is imported
by nothing else of meshcast. docs/integrations.md says what was run against what."""
