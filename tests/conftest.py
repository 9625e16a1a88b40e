"""What every test, and every process that a test starts, has in common."""

from __future__ import annotations

import os
import signal

# torch's store looks up the name of each address it connects to, and where no name server answers that takes
# seconds, which tests with short deadlines do not have. No query is sent with this (see resolv.conf(5));
# all addresses of the tests are loopback's.
os.environ["RES_OPTIONS"] = "attempts:0"

# nohup, and shells for what they start in the background, have signals ignored, and every process that is
# started inherits that. Tests of how ranks end need them as in a terminal. A handler is not inherited,
# and keeps pytest itself as it was.
for _signal in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, lambda *_: None)
