"""People beside a robot, by the device in their hands (entry points ``rlinf_vla.people``). Parsing is tested, no device has been tried."""
