"""What every test, and every process that a test starts, has in common."""

from __future__ import annotations

import os

# torch's store looks up the name of each address it connects to, and where no name server answers that takes
# seconds, which tests with short deadlines do not have. No query is sent with this (see resolv.conf(5));
# all addresses of the tests are loopback's.
os.environ["RES_OPTIONS"] = "attempts:0"
