"""The output of `train --json`."""

import dataclasses
import json

from table_samples import DIAGNOSIS, TRAIN

from amp_track.records.result import NonFiniteLosses


def test_the_json_has_the_scale_the_losses_and_the_diagnosis() -> None:
    losses = NonFiniteLosses(batches=7, first_step=2, first_batch=1)
    found = dataclasses.replace(TRAIN, job_result=dataclasses.replace(TRAIN.job_result, non_finite_losses=losses))
    shown = json.loads(json.dumps(found.as_json()))
    history = [[0, 65536], [1, 32768], [2, 16384], [1380, 16384]]
    assert shown["scale"] == {"initial": 65536, "final": 16384, "history": history}
    assert (shown["non_finite_losses"], shown["waited_fraction"]) == (7, None)
    assert shown["diagnosis"] == json.loads(json.dumps(dataclasses.asdict(DIAGNOSIS)))
    assert shown["advice"] == list(TRAIN.advice)
