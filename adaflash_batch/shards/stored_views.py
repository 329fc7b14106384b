"""Views of text and bytes within structs, which Arrow's Parquet writer cannot slice, as copies."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_LISTS = (
    (pa.types.is_list, pa.list_, pa.ListArray),
    (pa.types.is_large_list, pa.large_list, pa.LargeListArray),
)
_LIST_VIEWS = (
    (pa.types.is_list_view, pa.list_view, pa.ListViewArray),
    (pa.types.is_large_list_view, pa.large_list_view, pa.LargeListViewArray),
)


def stored_type(arrow_type: Any, in_struct: bool = False) -> Any:
    """The type with every view within a struct replaced by what it views."""
    types = pa.types
    if in_struct and types.is_string_view(arrow_type):
        return pa.large_string()
    if in_struct and types.is_binary_view(arrow_type):
        return pa.large_binary()
    if types.is_struct(arrow_type):
        return pa.struct([_stored_field(field, True) for field in arrow_type])
    if types.is_map(arrow_type):
        key, item = (_stored_field(f, True) for f in (arrow_type.key_field, arrow_type.item_field))
        return pa.map_(key, item, arrow_type.keys_sorted)
    if types.is_fixed_size_list(arrow_type):
        return pa.list_(_stored_field(arrow_type.value_field, in_struct), arrow_type.list_size)
    for is_kind, make, _ in _LISTS + _LIST_VIEWS:
        if is_kind(arrow_type):
            return make(_stored_field(arrow_type.value_field, in_struct))
    return arrow_type


def _stored_field(field: Any, in_struct: bool) -> Any:
    return field.with_type(stored_type(field.type, in_struct))


def stored_array(array: Any, wanted: Any) -> Any:
    """The array with `stored_type` of its own type.

    Built anew rather than cast: Arrow's cast of list views leaves out items (pyarrow 26).
    """
    kind, types = array.type, pa.types
    if kind.equals(wanted):
        return array
    if types.is_struct(kind):
        children = [stored_array(array.field(i), wanted.field(i).type) for i in range(len(wanted))]
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())
    if types.is_map(kind):
        return _stored_map(array, wanted)
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        used = array.values.slice(array.offset * size, len(array) * size)
        values = stored_array(used, wanted.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=wanted, mask=array.is_null())
    for is_kind, _, build in _LISTS:
        if is_kind(kind):
            values = stored_array(array.values, wanted.value_type)
            return build.from_arrays(_copy(array.offsets), values, wanted, mask=array.is_null())
    for is_kind, _, build in _LIST_VIEWS:
        if is_kind(kind):
            values = stored_array(array.values, wanted.value_type)
            places = _copy(array.offsets), _copy(array.sizes)
            return build.from_arrays(*places, values, wanted, mask=array.is_null())
    return array.cast(wanted)


def _stored_map(array: Any, wanted: Any) -> Any:
    keys = stored_array(array.keys, wanted.key_type)
    items = stored_array(array.items, wanted.item_type)
    return pa.MapArray.from_arrays(
        _copy(array.offsets), keys, items, type=wanted, mask=array.is_null()
    )


def _copy(numbers: Any) -> Any:
    """Without an offset of its own, which masks do not go together with."""
    return pa.array(numbers.to_numpy(zero_copy_only=False))
