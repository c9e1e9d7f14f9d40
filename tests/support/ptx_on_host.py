"""Translate PTX into C++ for the host, one instruction at a time, for the gather kernel.

The PTX ISA manual defines the instructions; unknown ones are refused. An access that is not aligned
to its own size ends the process, because a device would refuse it.
"""

from __future__ import annotations

import re

_C = {
    "pred": "bool",
    "u8": "uint8_t",
    "u16": "uint16_t",
    "b16": "uint16_t",
    "u32": "uint32_t",
    "b32": "uint32_t",
    "s32": "int32_t",
    "u64": "uint64_t",
    "b64": "uint64_t",
    "s64": "int64_t",
    "f32": "float",
    "f64": "double",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OPERATORS = {"and": "&", "or": "|", "xor": "^"}
_PLACES = {"%ctaid.x": "block", "%tid.x": "thread"}
_ARITHMETIC = {"add": "+", "sub": "-", "mul.lo": "*", "add.rn": "+", "mul.rn": "*"}

_PRELUDE = """
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ptx {
template <typename T>
T* aligned(uint64_t address, unsigned items = 1) {
  if (address % (sizeof(T) * items) != 0) {
    std::fprintf(stderr, "misaligned access to %llx\\n", static_cast<unsigned long long>(address));
    std::abort();
  }
  return reinterpret_cast<T*>(address);
}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned select = selector >> 4 * i & 15;
    const auto byte = static_cast<uint8_t>(bytes >> 8 * (select & 7));
    const unsigned sign = byte >> 7 != 0 ? 255 : 0;
    result |= (select & 8 ? sign : byte) << 8 * i;
  }
  return result;
}
inline uint64_t bfi(uint64_t a, uint64_t b, unsigned at, unsigned bits) {
  const uint64_t mask = (bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1) << at;
  return (b & ~mask) | (a << at & mask);
}
"""


def to_cpp(ptx: str, name: str) -> str:
    """Return a C++ function ``ptx::NAME(const void* parameters, uint32_t block, uint32_t thread)``.

    Args:
        ptx: source with one entry of this name, which has one parameter.

    Raises:
        ValueError: an instruction is unknown.
    """
    body = ptx[ptx.index("{", ptx.index(f".entry {name}(")) + 1 : ptx.rindex("}")]
    lines = [_line(line.strip()) for line in body.splitlines()]
    text = "\n".join(f"  {line}" for line in lines if line)
    signature = f"inline void {name}(const void* parameters, uint32_t block, uint32_t thread)"
    return f"{_PRELUDE}\n{signature} {{\n{text}\n}}\n}}  // namespace ptx\n"


def _line(line: str) -> str:
    if register := re.fullmatch(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;", line):
        kind, prefix, count = register.groups()
        return f"{_C[kind]} {', '.join(f'{prefix}{i} = 0' for i in range(int(count)))};"
    if not line or line.startswith(".pragma"):
        return ""
    if line.endswith(":"):
        return f"{line[1:-1]}:;"
    match = re.fullmatch(r"(?:@(!?)%(p\d+)\s+)?([\w.]+)(?:\s+(.*))?;", line)
    if match is None:
        raise ValueError(f"no instruction: {line!r}")
    negated, guard, name, operands = match.groups()
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]]+", operands or "")
    done = _instruction(name, parts)
    return f"if ({negated}{guard}) {{ {done} }}" if guard else done


def _instruction(name: str, parts: list[str]) -> str:
    base, _, kind = name.rpartition(".")
    if name == "ret":
        return "return;"
    if name in ("bra", "bra.uni"):
        return f"goto {parts[0][1:]};"
    if base in ("ld.param", "ld.global", "ld.global.nc", "ld.global.v2", "ld.global.nc.v2"):
        return _load(base, kind, parts)
    if base in ("st.global", "st.global.wb", "st.global.wb.v2"):
        return _store(base, kind, parts)
    to, *given = parts
    return f"{_operand(to)} = {_value(base, kind, given)};"


def _value(base: str, kind: str, given: list[str]) -> str:
    """Return the value that an instruction writes to its only register."""
    own = [_operand(part, kind) for part in given]
    whole = re.fullmatch(r"[a-z]+(\.[a-z]+)?", base)
    if base in ("mov", "cvta.to.global"):
        return own[0]
    if base in _ARITHMETIC:
        # Compute signed integers as unsigned, because PTX integers wrap around.
        kind = kind.replace("s", "u")
        return f" {_ARITHMETIC[base]} ".join(_operand(part, kind) for part in given)
    if base in _OPERATORS and kind != "f32":
        return f"{own[0]} {_OPERATORS[base]} {own[1]}"
    if base == "not":
        return f"!{own[0]}" if kind == "pred" else f"~{own[0]}"
    if base == "mul.wide" and kind == "u32":
        return f"uint64_t{{{own[0]}}} * {own[1]}"
    if base == "mul.hi" and kind == "u32":
        return f"uint32_t(uint64_t{{{own[0]}}} * {own[1]} >> 32)"
    if base in ("shl", "shr"):
        sign, bits = ("<<" if base == "shl" else ">>"), int(kind[1:])
        by = _operand(given[1], "u32")
        return f"{by} >= {bits} ? 0 : {own[0]} {sign} {by}"
    if base.startswith("setp.") and whole:
        return f"{own[0]} {_COMPARISONS[base[5:]]} {own[1]}"
    if base == "selp":
        return f"{_operand(given[2])} ? {own[0]} : {own[1]}"
    if base == "prmt":
        return f"prmt({', '.join(own)})"
    if base == "bfi" and kind == "b64":
        return f"bfi({', '.join(own)})"
    if match := re.fullmatch(r"cvt(?:\.rn)?\.(\w+)", base):
        return f"static_cast<{_C[match[1]]}>({own[0]})"
    raise ValueError(f"an instruction that is not known: {base}.{kind}")


def _load(base: str, kind: str, parts: list[str]) -> str:
    to, place = parts
    if base == "ld.param":
        offset = place.strip("[]").partition("+")[2] or "0"
        source = f"static_cast<const char*>(parameters) + {offset}"
        return f"std::memcpy(&{_operand(to)}, {source}, sizeof({_C[kind]}));"
    targets = [_operand(part.strip()) for part in to.strip("{}").split(",")]
    pointer = f"aligned<const {_C[kind]}>({_address(place)}, {len(targets)})"
    return " ".join(
        [f"{{ const auto* at = {pointer};"]
        + [f"{target} = at[{i}];" for i, target in enumerate(targets)]
        + ["}"]
    )


def _store(base: str, kind: str, parts: list[str]) -> str:
    place, value = parts
    values = [_operand(part.strip(), kind) for part in value.strip("{}").split(",")]
    pointer = f"aligned<{_C[kind]}>({_address(place)}, {len(values)})"
    return " ".join(
        [f"{{ auto* at = {pointer};"]
        + [f"at[{i}] = {own};" for i, own in enumerate(values)]
        + ["}"]
    )


def _address(place: str) -> str:
    """Return the address in ``[%rd1+8]``; the offset may be negative."""
    register, _, offset = place.strip("[]").partition("+")
    return f"{_operand(register)} + static_cast<uint64_t>(int64_t{{{offset or 0}}})"


def _operand(part: str, kind: str | None = None) -> str:
    """Return a register, an address or a number as a value of this type."""
    if match := re.fullmatch(r"0d([0-9A-Fa-f]{16})", part):
        return f"std::bit_cast<double>(uint64_t{{0x{match[1]}}})"
    if match := re.fullmatch(r"0f([0-9A-Fa-f]{8})", part):
        return f"std::bit_cast<float>(uint32_t{{0x{match[1]}}})"
    text = _PLACES.get(part) or part.removeprefix("%")
    if kind is None or kind.startswith("f"):
        return text
    return f"static_cast<{_C[kind]}>({text})"
