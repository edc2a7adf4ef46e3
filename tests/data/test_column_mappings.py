"""The columns of a batch: numpy as stored, tensors as read, and errors that name the column at fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from data_cases import small, train_batch

from cadenza.data import DataProto
from cadenza.data.ragged import Ragged


def test_a_ragged_column_reads_as_a_tensor_padded_to_its_longest_row() -> None:
    ids = small().batch["input_ids"]
    assert ids.tolist() == [[1, 2, 0], [1, 0, 0], [1, 2, 3]]
    assert ids.dtype == torch.int32


def test_step_scores_are_padded_with_0_and_turns_tells_their_number() -> None:
    batch = train_batch().batch
    assert batch["step_scores"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert batch["turns"].tolist() == [1, 2]


def test_a_batch_on_a_device_reads_there_and_leaves_the_first_where_it_is() -> None:
    data = small()
    moved = data.to("meta")
    assert {tensor.device.type for tensor in moved.batch.values()} == {"meta"}
    assert moved.batch["input_ids"].shape == (3, 3)
    assert {tensor.device.type for tensor in data.batch.values()} == {"cpu"}
    assert moved == data
    assert {tensor.device.type for tensor in data.batch.to("meta").values()} == {"meta"}


def test_what_is_assigned_to_the_columns_on_a_device_stays_out_of_the_batch_they_came_from() -> None:
    data = small()
    columns = data.batch.to("meta")
    columns["more"] = np.zeros(3, np.float32)
    assert columns["more"].device.type == "meta"
    assert "more" not in data.batch


def test_columns_of_the_same_tokens_have_the_same_width() -> None:
    batch = train_batch()[:1].batch
    assert {tuple(batch[name].shape) for name in ("input_ids", "response_mask", "position_ids")} == {(1, 2)}


def test_reading_a_column_twice_gives_the_same_tensor() -> None:
    batch = small().batch
    assert batch["input_ids"] is batch["input_ids"]


def test_a_dense_column_becomes_a_tensor_without_a_copy() -> None:
    scores = np.zeros(3, np.float32)
    data = DataProto({"scores": scores})
    assert np.shares_memory(data.batch["scores"].numpy(), scores)
    assert np.shares_memory(data[1:].batch.numpy("scores"), scores)


def test_a_read_only_column_is_copied_so_that_torch_cannot_write_into_shared_memory() -> None:
    scores = np.zeros(3, np.float32)
    scores.flags.writeable = False
    data = DataProto({"scores": scores, "ids": Ragged(np.broadcast_to(np.int32(1), 6), [0, 2, 4, 6])})
    data.batch["scores"].fill_(1)
    assert data.batch["ids"].fill_(2).tolist() == [[2, 2]] * 3
    assert not scores.any()


def test_tensors_and_reversed_arrays_are_columns_too() -> None:
    weights = torch.ones(3, 2, requires_grad=True)
    data = DataProto({"weights": weights, "reversed": np.arange(3)[::-1], "rows": [torch.ones(1)] * 3})
    assert data.batch["weights"].tolist() == [[1, 1]] * 3
    assert data.batch["reversed"].tolist() == [2, 1, 0]
    assert data.batch.ragged("rows").lengths.tolist() == [1, 1, 1]


def test_assigning_a_column_replaces_the_tensor_that_was_read() -> None:
    data = small()
    assert data.batch["scores"].sum() == 1.5
    data.batch["scores"] = torch.ones(3)
    assert data.batch["scores"].sum() == 3
    del data.batch["scores"]
    assert "scores" not in data.batch


def test_a_padded_result_assigned_like_a_ragged_column_shrinks_with_it() -> None:
    data = small()
    data.batch.assign_like("advantages", data.batch["input_ids"] * 0.5, like="input_ids")
    part = data[:2]
    assert part.batch["advantages"].shape == part.batch["input_ids"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"column 'advantages' is \[2, 3\], 'input_ids' is padded to \[2, 2\]"):
        part.batch.assign_like("advantages", torch.ones(2, 3), like="input_ids")


def test_the_columns_of_another_batch_are_taken_ragged() -> None:
    data = small()
    assert DataProto(data.batch, data.non_tensor_batch, data.meta_info) == data


def test_an_object_column_keeps_lists_of_one_length_as_objects() -> None:
    data = DataProto(non_tensor_batch={"pairs": [[1, 2], [3, 4]], "names": np.array(["x", "y"])})
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert type(data.non_tensor_batch["names"][0]) is str


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        (np.zeros(2), ValueError, "column 'x' has 2 rows, the batch has 3"),
        (np.array(1.0), ValueError, "column 'x' is one value"),
        (
            np.array(["a", "b", "c"]),
            TypeError,
            "column 'x' has dtype <U1, which no tensor has: use non_tensor_batch",
        ),
        ([1, 2, 3], TypeError, "column 'x': expected a numpy array, .* got a int"),
        ("abc", TypeError, "column 'x': expected a numpy array, .* got a str"),
        (
            [np.zeros(1), np.zeros(1, int), np.zeros(1)],
            TypeError,
            "column 'x': row 1 is int64, row 0 is float64",
        ),
        ([np.zeros((1, 1))] * 3, ValueError, "column 'x': row 0 of a ragged column must be 1-D"),
        (torch.zeros(3, dtype=torch.bfloat16), TypeError, r"column 'x' is bfloat16.* \.float\(\)"),
    ],
)
def test_a_bad_column_is_refused_by_name(column: Any, error: type[Exception], message: str) -> None:
    data = small()
    with pytest.raises(error, match=message):
        data.batch["x"] = column
    assert data == small()


def test_a_bad_object_column_is_refused_by_name() -> None:
    data = small()
    with pytest.raises(ValueError, match="column 'x' has 2 rows, the batch has 3"):
        data.non_tensor_batch["x"] = ["a", "b"]
    with pytest.raises(TypeError, match="column 'x': expected one object per row, got str"):
        data.non_tensor_batch["x"] = "abc"


def test_a_name_belongs_to_one_column_only() -> None:
    with pytest.raises(ValueError, match="column 'task' is in both"):
        small().batch["task"] = np.zeros(3)
    with pytest.raises(ValueError, match="column 'scores' is in both"):
        small().non_tensor_batch["scores"] = [1, 2, 3]


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="no tensor column 'ids', there are: input_ids, scores"):
        small().batch["ids"]
    with pytest.raises(KeyError, match="no object column 'ids', there are: task"):
        small().non_tensor_batch["ids"]
    with pytest.raises(KeyError, match="no meta_info key 'x', there are: global_step"):
        small().select(meta_info_keys=["x"])
    with pytest.raises(TypeError, match="column 'scores' is dense float32"):
        small().batch.ragged("scores")
