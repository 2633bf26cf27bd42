"""A model for paged attention whose layers have lengths and block tables of their own.

OpenVINO's transformation turns a stateful model into one with paged-attention operations that share their lengths. Here
each operation gets inputs of its own for them, and the last layer reads only the tokens whose logits are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as opset

#: Releases of openvino that the tests were run with.
WORKS = ("2026.4.1",)

_OPERATION = "PagedAttentionExtension"

#: The operation's inputs that every layer gets for itself, by place. The third, the block indices, the transformation
#: already makes for each layer.
_OWN_INPUTS = {5: "past_lens", 8: "block_indices_begins", 12: "max_context_len"}

#: What the transformation must have put there.
_EXPECTED = {
    **_OWN_INPUTS,
    3: "key_cache",
    4: "value_cache",
    6: "subsequence_begins",
    7: "block_indices",
    13: "score_aggregation_window",
}

#: The operation's inputs that must be empty or 0, by place.
_BY_DISTANCE = {10: "a sliding window", 11: "a bias by distance (ALiBi)"}

#: Which tokens of a step have their logits worked out.
ASKED = "asked_tokens"

#: Every input of a model that is served, without the number of its layer.
_INPUTS = {
    "input_ids",
    "position_ids",
    "subsequence_begins",
    "score_aggregation_window",
    ASKED,
    "key_cache",
    "value_cache",
    "past_lens",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
}


def to_paged(model: Any) -> int:
    """Turn a stateful decoder into one with a paged cache for each layer, in place, and return how many layers it has.

    A step of T tokens in S sequences has these inputs, int32 but for those of one a token, which are int64:

    - ``input_ids`` and ``position_ids``, ``(T,)``, and ``asked_tokens``, the tokens whose logits are wanted;
    - ``subsequence_begins``, ``(S + 1,)``, and ``score_aggregation_window``, ``(S,)``;
    - for each layer l ``key_cache.l``, ``value_cache.l``, ``past_lens.l``, ``(S,)``, ``block_indices.l``,
      ``block_indices_begins.l``, ``(S + 1,)``, and ``max_context_len.l``, a number.

    Its outputs are ``logits``, a row for each asked token, and for each layer ``scores.l``: the attention to the rows
    of all sequences, one sequence after the other, summed over query heads and the last queries.

    Raises
    ------
    ImportError
        The installed openvino does not have the transformation, or has another one.
    ValueError
        The model has no attention that the transformation knows.
    """
    transformation = _transformation()
    try:
        transformation(model, use_block_indices_inputs=True, use_score_outputs=True, allow_score_aggregation=True)
    except RuntimeError as error:  # OpenVINO's
        raise ValueError(f"path: openvino cannot give the model a paged cache: {error}") from None
    operations = [node for node in model.get_ordered_ops() if node.get_type_name() == _OPERATION]
    if not operations:
        raise ValueError("path: the model has no attention that openvino's paged_attention_transformation knows")
    layers = [_layer_of(operation) for operation in operations]
    for layer, operation in zip(layers, operations, strict=True):
        _check_rows_are_alike(layer, operation)
    if sorted(layers) != list(range(len(operations))):
        raise _unknown(f"the caches are numbered {sorted(layers)}")
    _give_own_inputs(model, dict(zip(layers, operations, strict=True)))
    _read_asked_tokens_alone(model)
    model.validate_nodes_and_infer_types()
    _check_inputs(model.get_parameters())
    return len(operations)


def _transformation() -> Any:
    """Return openvino's transformation, or say why there is none to be used."""
    try:
        module = importlib.import_module("openvino._offline_transformations")
        transformation = module.paged_attention_transformation
    except (ImportError, AttributeError) as error:
        raise _unknown(str(error)) from None
    # Options are in the text alone: the function is compiled and has no signature.
    text = transformation.__doc__ or ""
    for option in ("use_block_indices_inputs", "use_score_outputs", "allow_score_aggregation"):
        if option not in text:
            raise _unknown(f"paged_attention_transformation has no {option}")
    return transformation


def _unknown(what: str) -> ImportError:
    """Return the error for an openvino whose private parts are not those that are used here."""
    return ImportError(
        f"pb_kvcache.openvino uses private parts of openvino, and openvino {ov.__version__} has others ({what}); it "
        f"works with openvino {', '.join(WORKS)}"
    )


def _names(node: Any) -> set[str]:
    return set(node.output(0).get_names()) | {node.get_friendly_name()}


def _layer_of(operation: Any) -> int:
    """Return the number of an operation's layer, after checking that its inputs are where they are expected."""
    for place, name in _EXPECTED.items():
        if place >= operation.get_input_size():
            raise _unknown(f"the operation has {operation.get_input_size()} inputs")
        names = _names(operation.input_value(place).get_node())
        if not any(known == name or known.startswith(name + ".") for known in names):
            raise _unknown(f"input {place} of the operation is {sorted(names)}, not {name}")
    (name,) = (name for name in _names(operation.input_value(3).get_node()) if name.startswith("key_cache."))
    return int(name.split(".")[1])


def _check_rows_are_alike(layer: int, operation: Any) -> None:
    """Refuse attention that counts rows as positions, which they are not after an eviction."""
    for place, what in _BY_DISTANCE.items():
        value = operation.input_value(place).get_node()
        if value.get_type_name() != "Constant" or np.any(value.data):
            raise ValueError(
                f"path: layer {layer} of the model has {what}, which counts rows, and an eviction drops some"
            )


def _check_inputs(parameters: list[Any]) -> None:
    """Refuse a model that reads something that is not given here, or does not read positions."""
    for parameter in parameters:
        name = parameter.get_friendly_name()
        if name.partition(".")[0] not in _INPUTS:
            raise ValueError(f"path: the model has an input {name}, which nothing is known of; it must read text alone")
        if name == "position_ids" and parameter.get_partial_shape().rank.get_length() != 1:
            raise ValueError("path: a position of the model has several parts, it must be one number")
    for name in ("input_ids", "position_ids"):
        if all(parameter.get_friendly_name() != name for parameter in parameters):
            raise ValueError(f"path: the model has no input {name}")


def _parameter(name: str, shape: list[int], kind: Any) -> Any:
    parameter = opset.parameter(shape, kind)
    parameter.set_friendly_name(name)
    parameter.output(0).set_names({name})
    return parameter


def _give_own_inputs(model: Any, operations: dict[int, Any]) -> None:
    """Replace the lengths and block starts that all operations share by one input a layer."""
    shared = {name: operations[0].input_value(place).get_node() for place, name in _OWN_INPUTS.items()}
    added = []
    for layer, operation in operations.items():
        for place, name in _OWN_INPUTS.items():
            own = _parameter(f"{name}.{layer}", [] if name == "max_context_len" else [-1], ov.Type.i32)
            operation.input(place).replace_source_output(own.output(0))
            added.append(own)
    model.add_parameters(added)
    for name, parameter in shared.items():
        readers = parameter.output(0).get_target_inputs()
        if readers:  # a model whose rotary phases, say, depend on the lengths
            reader = next(iter(readers)).get_node().get_friendly_name()
            raise ValueError(f"path: {reader} of the model reads {name}, which layers here do not have in common")
        model.remove_parameter(parameter)


def _read_asked_tokens_alone(model: Any) -> None:
    """Let the product with the vocabulary read the rows of the asked tokens: of a long prompt, the last one."""
    results = [result for result in model.get_results() if "logits" in result.input_value(0).get_names()]
    if not results:
        raise ValueError("path: the model has no output named logits")
    node = results[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if node.get_input_size() == 0:
            raise ValueError("path: the model's logits are not the product of a matrix")
        node = node.input_value(0).get_node()
    asked = _parameter(ASKED, [-1], ov.Type.i64)
    rows = opset.gather(node.input_value(0), asked, opset.constant(np.array(0, np.int64)))
    node.input(0).replace_source_output(rows.output(0))
    model.add_parameters([asked])
