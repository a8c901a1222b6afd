"""Run a policy in vectorised simulators: players, actors, collectors, noise and demonstrations."""
