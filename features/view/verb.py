"""The verb ``view``."""

from __future__ import annotations

from rlinf_vla.core.verb import SEE, Help, Verb

VIEW = Verb(
    SEE,
    "a local web page of a run, a sweep or a dataset",
    "rlinf_vla.features.view.command",
    Help(
        ("{RUN|SWEEP|DATASET} [OPTIONS]",),
        (
            ("RUN", "directory of a run, or its name in runs/"),
            ("SWEEP", "run directory of an evaluation sweep, or its name in runs/"),
            ("DATASET", "directory of a LeRobotDataset"),
            ("--port N", "port to listen on (8090); 0: any free one"),
            (
                "--host HOST",
                "address to listen on (127.0.0.1); others than this machine's need --token",
            ),
            ("--token", "only who knows the printed address may see the page"),
            ("--open", "open the page in a browser"),
        ),
        (
            "maniskill_ppo/20261101-100000",
            "runs/maniskill_eval/20261101-100000 --open",
            "pushes --port 8091",
        ),
        "The page follows a run that goes on. Ctrl-C ends; nothing is written.",
    ),
)
