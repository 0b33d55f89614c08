"""What the host does between programs: functions over arrays, lists (sequences) and None (an empty optional).

Strings are object arrays of ``str``. A function is found by its name (:func:`function`), which a compiled model keeps;
its inputs come from a stranger's model, so whatever it cannot do is an OnnxcError.
"""
