"""Triton's interpreter, ten times as fast, for the tests of the triton backend.

The interpreter sends every operation on a few numbers through the compiler's frontend, whose type
checks take a hundred times as long as numpy does. Here the first operation of a kind goes that way;
if numpy by itself gives the same bits, those that follow go straight to numpy. A kind is a function
with the types and shapes of its operands, and the values of Python's numbers among them. Whatever
this does not know is done by the interpreter as before.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

NARROW = {"bf16", "fp16", "fp8e4b15", "fp8e4nv", "fp8e4b8", "fp8e5", "fp8e5b16"}
"""Types whose conversions are not always numpy's."""

ARITHMETIC: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": lambda x, y: (x - np.fmod(x, y)) // y,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
COMPARISONS: dict[str, Function] = {
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}


def quicken_interpreter() -> QuickLanguage:
    """Patch Triton's interpreter, which must be in use, for good."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _patch_less(interpreter)
    _skip_unread_checks(interpreter)
    _quicken_types(interpreter)
    _widen_exactly(interpreter)
    quick = QuickLanguage(interpreter)
    quick.install()
    return quick


def _patch_less(interpreter: Any) -> None:
    """Have it patch the language's modules once, not at every launch and call of a function."""
    executor, function = interpreter.GridExecutor, interpreter.InterpretedFunction
    launch, patch = executor.__call__, interpreter._patch_lang
    languages: Any = [
        importlib.import_module("triton.language"),
        importlib.import_module("triton.language.core"),
    ]
    patched: set[frozenset[int]] = set()
    visible: dict[int, frozenset[int]] = {}

    class Kept:
        """A scope whose patches stay: the next launch wants the same ones."""

        def restore(self) -> None:
            pass

    kept = Kept()

    def patch_once(fn: Any) -> Kept:
        module = id(fn.__globals__)
        if module not in visible:
            values = fn.__globals__.values()
            visible[module] = frozenset(id(v) for v in values if any(v is x for x in languages))
        if visible[module] not in patched:
            patch(fn)
            patched.add(visible[module])
        return kept

    def launch_silently(self: Any, *args: Any, **kwargs: Any) -> Any:
        # numpy would warn where a GPU says nothing.
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch_once
    executor.__call__, function.__call__ = launch_silently, call


def _skip_unread_checks(interpreter: Any) -> None:
    """Integers are added once more in 64 bits, for an assertion that only debugging makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _quicken_types(interpreter: Any) -> None:
    """Work out once a type what depends on the type alone."""
    tensor: Any = importlib.import_module("triton.language.core").tensor
    numpy_dtype, init = interpreter._get_np_dtype, tensor.__init__
    dtypes: dict[str, np.dtype[Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}

    def cached_dtype(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            init(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    interpreter._get_np_dtype, tensor.__init__ = cached_dtype, make_tensor


def _widen(data: Array) -> Array:
    """bf16, as uint16, as fp32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def _widen_exactly(interpreter: Any) -> None:
    """Its own conversion of bf16 to fp32 takes subnormals for other numbers."""
    convert = interpreter._convert_float

    def convert_float(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        if (source.name, target.name) == ("bf16", "fp32"):
            return _widen(data)
        converted: Array = convert(data, source, target, rounding)
        return converted

    interpreter._convert_float = convert_float


class QuickLanguage:
    """Quick versions of the language's functions.

    checked: while it is a number, all operations go both ways, and it counts those that numpy does.

    A recipe is how numpy does operations of a kind, and begins with a `like`: a tensor of the
    result's type, whose data do not matter. False: it does not.
    """

    def __init__(self, interpreter: Any) -> None:
        self.language: Any = importlib.import_module("triton.language")
        self.core = self.language.core
        self.tensor, self.constexpr = self.core.tensor, self.core.constexpr
        self.handle = interpreter.TensorHandle
        self.semantic = interpreter.interpreter_semantic
        self.check = self.semantic.binary_op_type_checking_impl
        self.memory, self.mulhi_64 = interpreter._interpreter, interpreter.np_umulhi_u64
        self.dtype = interpreter._get_np_dtype
        self.numbers: dict[Any, Any] = {}
        self.checked: int | None = None

    def install(self) -> None:
        language, tensor = self.language, self.tensor
        for name, by_numpy in ARITHMETIC.items():
            for prefix in ("", "r"):
                full_name = f"__{prefix}{name}__"
                quick = self._arithmetic(getattr(tensor, full_name), name, by_numpy, bool(prefix))
                setattr(tensor, full_name, quick)
        for name, by_numpy in COMPARISONS.items():
            setattr(tensor, name, self._typed(getattr(tensor, name), by_numpy))
        tensor.to, tensor.__getitem__ = self._to(tensor.to), self._getitem(tensor.__getitem__)
        for name, by_numpy in (("minimum", np.minimum), ("maximum", np.maximum)):
            setattr(language, name, self._typed(getattr(language, name), by_numpy))
        for name in ("exp2", "log2", "ceil", "sqrt"):
            setattr(language, name, self._unary(getattr(language, name), getattr(np, name)))
        tensor.__neg__ = self._unary(tensor.__neg__, lambda x: np.subtract(x.dtype.type(0), x))
        tensor.__invert__ = self._unary(tensor.__invert__, np.invert)
        language.div_rn = self._typed(language.div_rn, np.divide)
        language.math.umulhi = language.umulhi = self._typed(language.umulhi, self.mulhi)
        language.fma, language.reshape = self._fma(language.fma), self._reshape(language.reshape)
        for name in ("add", "sub", "mul"):
            # What operators call, and Philox, which lets 32 bits overflow.
            setattr(self.core, name, self._named(getattr(self.core, name), getattr(operator, name)))
        for name, by_numpy in (
            ("sum", np.add.reduce),
            ("max", np.fmax.reduce),
            ("min", np.fmin.reduce),
            ("cumsum", np.cumsum),
        ):
            setattr(language, name, self._reduction(getattr(language, name), by_numpy))
        language.where = self._where(language.where)
        language.load, language.store = self._load(language.load), self._store(language.store)
        language.arange, language.full = (
            self._constant(function) for function in (language.arange, language.full)
        )
        language.zeros = lambda shape, dtype: language.full(shape, 0, dtype)
        language.zeros_like = lambda x: language.full(x.shape, 0, x.dtype)
        language.sort = self._sort

    # What all of them need.

    def slow(self, function: Any) -> Function:
        """A function of the language as the interpreter calls it."""
        if not self.core.is_builtin(function):
            return function  # type: ignore[no-any-return]
        return lambda *args, **kwargs: function(*args, **kwargs, _semantic=self.semantic)

    def learning(
        self,
        slow: Function,
        kind: Function,
        learn: Function,
        run: Function,
        recipes: dict[Any, Any] | None = None,
    ) -> Function:
        """kind, of the operands: what a recipe serves. learn: the recipe for operands, given the
        result too. run: the result by a recipe. recipes: where what is learnt is kept."""
        recipes = {} if recipes is None else recipes

        def call(*operands: Any) -> Any:
            key = kind(*operands)
            recipe = recipes.get(key)
            if recipe is None:
                result = slow(*operands)
                recipe = learn(result, *operands)
                if recipe and not self.same(result, run(recipe, *operands)):
                    recipe = False
                recipes[key] = recipe
                return result
            if recipe and self.checked is not None:
                result = slow(*operands)
                assert self.same(result, run(recipe, *operands)), key
                self.checked += 1
                return result
            return run(recipe, *operands) if recipe else slow(*operands)

        return call

    def same(self, one: Any, other: Any) -> bool:
        a, b = one.handle, other.handle
        return bool(
            one.type.name == other.type.name
            and a.dtype.name == b.dtype.name
            and type(a.data) is type(b.data)
            and a.data.dtype == b.data.dtype
            and a.data.shape == b.data.shape
            and a.data.tobytes() == b.data.tobytes()
        )

    def make(self, data: Array, dtype: Any, like: Any) -> Any:
        handle = self.handle.__new__(self.handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        made = self.tensor.__new__(self.tensor)
        made.handle, made.type, made.dtype = handle, like.type, like.dtype
        made.shape, made.numel = like.shape, like.numel
        return made

    def like(self, result: Any) -> Any:
        return self.tensor(None, result.type)

    def scalar(self, filled: Any) -> Any:
        """A tensor that has filled another."""
        data, dtype = filled.handle.data.flat[:1].copy(), filled.handle.dtype.scalar
        return self.tensor(self.handle(data, dtype), filled.type.scalar)

    def mulhi(self, x: Array, y: Array) -> Any:
        if x.dtype.itemsize == 8:
            return self.mulhi_64(x, y)
        wide = np.dtype(f"u{2 * x.dtype.itemsize}")
        product = np.multiply(x.astype(wide), y.astype(wide))
        return (product >> (8 * x.dtype.itemsize)).astype(x.dtype)

    def filling(self, data: Array, other: Array) -> Array:
        return data if data.shape == other.shape else np.broadcast_to(data, other.shape)

    def plain(self, value: Any) -> Any:
        """What tells a shape, a number or a type from others."""
        if type(value) is self.constexpr:
            value = value.value
        if isinstance(value, (list, tuple, self.core.tuple)):
            return tuple(self.plain(part) for part in value)
        return type(value), getattr(value, "name", value)

    def number(self, value: Any) -> Any:
        """The tensor of a number by itself; what is a tensor stays as it is."""
        if type(value) is self.constexpr:
            value = value.value
        if type(value) is self.tensor or value is None:
            return value
        key = type(value), value
        if key not in self.numbers:
            self.numbers[key] = self.semantic.to_tensor(value)
        return self.numbers[key]

    def name(self, operand: Any) -> Any:
        return operand.type.name if type(operand) is self.tensor else operand

    def cast(self, operand: Any, target: Any) -> tuple[Any, np.dtype[Any] | None]:
        """What type an operand has to become before numpy sees it; None: it is of that type.

        KeyError where the conversion is not numpy's.
        """
        before, after = operand.type.scalar, target.type.scalar
        if before.name == after.name:
            return None, None
        if before.is_ptr() or after.is_ptr() or {before.name, after.name} & (NARROW | {"int1"}):
            raise KeyError(before.name)
        return after, self.dtype(after)

    # Functions of two operands.

    def _pair(self, slow: Function, operation: str, by_numpy: Function, swapped: bool) -> Function:
        """A function of two tensors; swapped: the second one is its first operand."""
        div = operation in ("truediv", "floordiv", "mod")

        def kind(x: Any, y: Any) -> Any:
            return x.type.name, y.type.name

        def learn(result: Any, x: Any, y: Any) -> Any:
            if swapped:
                x, y = y, x
            if x.type.scalar.is_ptr() or y.type.scalar.is_ptr():
                if operation not in ("add", "sub") or y.type.scalar.is_ptr():
                    return False
                width = max(1, x.type.scalar.element_ty.primitive_bitwidth // 8)

                def further(a: Array, b: Array) -> Any:
                    return by_numpy(a, width * b.astype(np.uint64))

                return self.like(result), None, None, None, further
            a, b = self.check(x, y, False, False, True, div)
            try:
                (dtype, cast_x), (_, cast_y) = self.cast(x, a), self.cast(y, b)
            except KeyError:
                return False
            return self.like(result), dtype, cast_x, cast_y, by_numpy

        def run(recipe: Any, x: Any, y: Any) -> Any:
            like, dtype, cast_x, cast_y, function = recipe
            left, right = (y.handle, x.handle) if swapped else (x.handle, y.handle)
            a, b = left.data, right.data
            if cast_x is not None:
                a = a.astype(cast_x)
            if cast_y is not None:
                b = b.astype(cast_y)
            return self.make(function(a, b), dtype or left.dtype.scalar, like)

        recipes: dict[Any, Any] = {}
        carefully = self.learning(slow, kind, learn, run, recipes)

        def quickly(x: Any, y: Any) -> Any:
            # `kind` once more: two thirds of all operations come here, and calls are dear.
            recipe = recipes.get((x.type.name, y.type.name))
            if not recipe or self.checked is not None:
                return carefully(x, y)
            return run(recipe, x, y)

        return quickly

    def _arithmetic(self, function: Any, name: str, by_numpy: Function, swapped: bool) -> Function:
        """An operator in which a number takes the other operand's type if that can hold it."""
        slow = self.slow(function)
        pair = self._pair(slow, name, by_numpy, swapped)
        div, pointers = name in ("truediv", "floordiv", "mod"), name in ("add", "sub")
        tensor, constexpr = self.tensor, self.constexpr
        constants: dict[Any, Any] = {}

        def constant(x: Any, value: Any) -> Any:
            """The tensor that stands for a number beside x; None where x is converted."""
            if type(value) not in (int, float, bool) or (x.type.scalar.is_ptr() and not pointers):
                return None
            operands = (value, x) if swapped else (x, value)
            checked = self.check(*operands, pointers, pointers and name == "add", True, div)
            beside, filled = reversed(checked) if swapped else checked
            return self.scalar(filled) if beside is x else None

        def calculate(x: Any, y: Any) -> Any:
            if type(y) is constexpr:
                y = y.value
            if type(y) is not tensor:
                key = x.type.name, type(y), y
                if key not in constants:
                    result = slow(x, y)
                    constants[key] = constant(x, y)
                    return result
                found = constants[key]
                if found is None:
                    return slow(x, y)
                y = found
            return pair(x, y)

        return calculate

    def _typed(self, function: Any, by_numpy: Function) -> Function:
        """A function in which a number has a type of its own."""
        slow = self.slow(function)
        pair = self._pair(slow, "", by_numpy, False)

        def calculate(x: Any, y: Any, **options: Any) -> Any:
            return slow(x, y, **options) if options else pair(self.number(x), self.number(y))

        return calculate

    def _named(self, function: Any, quick: Function) -> Function:
        """An operator by its name."""

        def calculate(x: Any, y: Any, sanitize_overflow: Any = True, _semantic: Any = None) -> Any:
            if _semantic is None and type(x) is self.tensor:
                return quick(x, y)
            return function(x, y, sanitize_overflow, _semantic=self.semantic)

        return calculate

    # Other functions.

    def _where(self, function: Any) -> Function:
        slow = self.slow(function)
        tensor, constexpr = self.tensor, self.constexpr
        constants: dict[Any, Any] = {}

        def kind(condition: Any, x: Any, y: Any) -> Any:
            return condition.type.name, x.type.name, y.type.name

        def learn(result: Any, condition: Any, x: Any, y: Any) -> Any:
            if condition.type.scalar.name != "int1":
                return False
            a, b = self.check(x, y, True, True)
            try:
                (_, cast_x), (dtype, cast_y) = self.cast(x, a), self.cast(y, b)
            except KeyError:
                return False
            return self.like(result), dtype, cast_x, cast_y

        def run(recipe: Any, condition: Any, x: Any, y: Any) -> Any:
            like, dtype, cast_x, cast_y = recipe
            a, b = x.handle.data, y.handle.data
            if cast_x is not None:
                a = a.astype(cast_x)
            if cast_y is not None:
                b = b.astype(cast_y)
            data = np.where(condition.handle.data, a, b)
            return self.make(data, dtype or y.handle.dtype.scalar, like)

        select_tensors = self.learning(slow, kind, learn, run)

        def with_numbers(x: Any, y: Any) -> Any:
            """What stands for two operands, of which one or both are numbers; None: nothing."""
            a, b = self.check(x, y, True, True)
            if (type(x) is tensor and a is not x) or (type(y) is tensor and b is not y):
                return None
            return (
                None if type(x) is tensor else self.scalar(a),
                None if type(y) is tensor else self.scalar(b),
            )

        def select(condition: Any, x: Any, y: Any) -> Any:
            condition = self.number(condition)
            if type(x) is constexpr:
                x = x.value
            if type(y) is constexpr:
                y = y.value
            if type(x) is not tensor or type(y) is not tensor:
                key = type(x), self.name(x), type(y), self.name(y)
                if key not in constants:
                    constants[key] = with_numbers(x, y)
                found = constants[key]
                if found is None:
                    return slow(condition, x, y)
                a, b = found
                x, y = x if a is None else a, y if b is None else b
            return select_tensors(condition, x, y)

        return select

    def _to(self, function: Any) -> Function:
        slow = self.slow(function)

        def kind(x: Any, dtype: Any, _rounding: Any, bitcast: bool) -> Any:
            return x.type.name, dtype.name, bitcast

        def learn(result: Any, x: Any, _dtype: Any, _rounding: Any, bitcast: bool) -> Any:
            source, target = x.type.scalar, result.type.scalar
            if result is x:
                return self.like(result), None, None
            if source.is_ptr() or target.is_ptr():
                return False
            dtype = self.dtype(target)

            def convert(data: Array) -> Array:
                return data.view(dtype) if bitcast else data.astype(dtype)

            if bitcast or not {source.name, target.name} & NARROW:
                return self.like(result), target, convert
            if (source.name, target.name) == ("bf16", "fp32"):
                return self.like(result), target, _widen
            return False

        def run(recipe: Any, x: Any, *_: Any) -> Any:
            like, target, convert = recipe
            return x if convert is None else self.make(convert(x.handle.data), target, like)

        convert = self.learning(slow, kind, learn, run)

        def to(x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Any:
            if fp_downcast_rounding is not None:
                return slow(x, dtype, fp_downcast_rounding, bitcast)
            return convert(x, getattr(dtype, "value", dtype), None, bitcast)

        return to

    def _getitem(self, function: Any) -> Function:
        everything = slice(None)

        def kind(x: Any, parts: Any) -> Any:
            plain = type(parts) is tuple and all(p is None or p == everything for p in parts)
            return x.type.name, plain and tuple(part is None for part in parts)

        def learn(result: Any, x: Any, parts: Any) -> Any:
            return kind(x, parts)[1] and x.type.is_block() and (self.like(result),)

        def run(recipe: Any, x: Any, parts: Any) -> Any:
            return self.make(x.handle.data[parts], x.handle.dtype.scalar, recipe[0])

        return self.learning(self.slow(function), kind, learn, run)

    def _load(self, function: Any) -> Function:
        """Its options say how a GPU's caches are used."""
        builtin = self.slow(function)
        others: dict[Any, Array] = {}

        def slow(pointer: Any, mask: Any, other: Any, options: Any) -> Any:
            return builtin(pointer, mask, other, **options)

        def filler(other: Any, element: Any) -> Any:
            """What stands in the place of elements that are not loaded."""
            if type(other) is self.tensor:
                return self.semantic.cast(other, element).handle.data
            key = type(other), other, element.name
            if key not in others:
                others[key] = self.semantic.cast(self.number(other), element).handle.data
            return others[key]

        def kind(pointer: Any, mask: Any, other: Any, options: Any) -> Any:
            other_name = self.name(other) if type(other) is self.tensor else type(other)
            return pointer.type.name, self.name(mask), other_name, *options.items()

        def learn(result: Any, pointer: Any, *_: Any) -> Any:
            element, shape = pointer.type.scalar.element_ty, pointer.handle.data.shape
            if element.is_block() or element.name == "int1":
                return False
            dtype = self.dtype(element)
            return self.like(result), element, dtype, np.ones(shape, bool), np.zeros(shape, dtype)

        def run(recipe: Any, pointer: Any, mask: Any, other: Any, _options: Any) -> Any:
            like, element, dtype, chosen, otherwise = recipe
            at = pointer.handle.data
            if mask is not None:
                chosen = self.filling(mask.handle.data, at)
            if other is not None:
                otherwise = self.filling(filler(other, element), at)
            return self.make(self.memory.load(at, chosen, otherwise, dtype), element, like)

        load_tensors = self.learning(slow, kind, learn, run)

        def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
            if type(other) is self.constexpr:
                other = other.value
            return load_tensors(pointer, self.number(mask), other, options)

        return load

    def _store(self, function: Any) -> Function:
        slow = self.slow(function)
        recipes: dict[Any, Any] = {}

        def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> None:
            value, mask = self.number(value), self.number(mask)
            key = pointer.type.name, value.type.name, self.name(mask), *options.items()
            recipe = recipes.get(key)
            if not recipe:
                slow(pointer, value, mask, **options)
                element = pointer.type.scalar.element_ty
                known = not element.is_block() and element.name != "int1"
                recipes[key] = known and (element, np.ones(pointer.handle.data.shape, bool))
                return
            element, chosen = recipe
            at, data = pointer.handle.data, self.semantic.cast(value, element).handle.data
            if mask is not None:
                chosen = self.filling(mask.handle.data, at)
            self.memory.store(at, self.filling(data, at), chosen)

        return store

    def _reduction(self, function: Any, by_numpy: Function) -> Function:
        def kind(x: Any, axis: Any) -> Any:
            return x.type.name, axis

        def learn(result: Any, x: Any, _axis: Any) -> Any:
            source, target = x.type.scalar, result.type.scalar
            if {source.name, target.name} & NARROW:
                return False
            return self.like(result), target, self.dtype(target), source.name != target.name

        def run(recipe: Any, x: Any, axis: Any) -> Any:
            like, target, dtype, cast = recipe
            data = x.handle.data
            data = by_numpy(data.astype(dtype) if cast else data, axis=axis)
            return self.make(
                data.astype(dtype) if data.shape else np.array([data], dtype), target, like
            )

        reduce_tensors = self.learning(function, kind, learn, run)
        default = 0 if by_numpy is np.cumsum else None

        def reduce(x: Any, axis: Any = default, **options: Any) -> Any:
            return function(x, axis, **options) if options else reduce_tensors(x, axis)

        return reduce

    def _unary(self, function: Any, by_numpy: Function) -> Function:
        def kind(x: Any) -> Any:
            return x.type.name

        def learn(result: Any, _x: Any) -> Any:
            return (self.like(result),)

        def run(recipe: Any, x: Any) -> Any:
            return self.make(by_numpy(x.handle.data), x.handle.dtype.scalar, recipe[0])

        unary = self.learning(self.slow(function), kind, learn, run)
        return lambda x: unary(self.number(x))

    def _fma(self, function: Any) -> Function:
        def kind(x: Any, y: Any, z: Any) -> Any:
            return x.type.name, y.type.name, z.type.name

        def learn(result: Any, *operands: Any) -> Any:
            equal = all(x.type.scalar.name == result.type.scalar.name for x in operands)
            return equal and (self.like(result),)

        def run(recipe: Any, x: Any, y: Any, z: Any) -> Any:
            a, b, c = x.handle.data, y.handle.data, z.handle.data
            return self.make(a * b + c, z.handle.dtype.scalar, recipe[0])

        fma = self.learning(self.slow(function), kind, learn, run)
        return lambda x, y, z: fma(self.number(x), self.number(y), self.number(z))

    def _reshape(self, function: Any) -> Function:
        def kind(x: Any, shape: Any) -> Any:
            return x.type.name, self.plain(shape)

        def learn(result: Any, _x: Any, _shape: Any) -> Any:
            return (self.like(result),)

        def run(recipe: Any, x: Any, _shape: Any) -> Any:
            return self.make(
                x.handle.data.reshape(recipe[0].type.shape), x.handle.dtype.scalar, recipe[0]
            )

        slow = self.slow(function)
        reshape_to = self.learning(slow, kind, learn, run)

        def reshape(x: Any, *shape: Any, **options: Any) -> Any:
            if options or len(shape) != 1 or not x.type.is_block():
                return slow(x, *shape, **options)
            return reshape_to(x, shape[0])

        return reshape

    def _constant(self, function: Any) -> Function:
        """A function of numbers alone, whose results are shared and cannot be written to."""
        slow = self.slow(function)
        made: dict[Any, Any] = {}

        def constant(*args: Any, **kwargs: Any) -> Any:
            if kwargs or any(type(value) is self.tensor for value in args):
                return slow(*args, **kwargs)
            key = self.plain(args)
            if key not in made:
                made[key] = slow(*args)
                made[key].handle.data.setflags(write=False)
            return made[key]

        return constant

    def _sort(self, x: Any, dim: Any = None, descending: Any = False) -> Any:
        """By numpy at once: the language's goes through hundreds of reductions by element."""
        values = np.sort(x.handle.data, axis=-1)
        if getattr(descending, "value", descending):
            values = values[..., ::-1]
        return self.make(np.ascontiguousarray(values), x.handle.dtype, x)
