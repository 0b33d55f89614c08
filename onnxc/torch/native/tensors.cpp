// Calls of a program with PyTorch's tensors where they lie. To ask a tensor for its address, and then for its shape,
// strides and dtype, takes Python a microsecond each; here DLPack's exchange API tells all at once. What is relied on
// is DLPack's ABI (version 1) and CPython's tuple; the caller tests once, with `tensor_facts`, that all of this holds.
// The first part of a call runs with Python's lock, the program without it.

#define EXPORT extern "C" __attribute__((visibility("default")))
typedef long long i64;

// DLTensor.
struct Tensor {
  char *data;
  int device, device_number;
  int rank;
  unsigned char code, bits;
  unsigned short lanes;
  const i64 *shape, *strides;
  unsigned long long offset;
};

// What of Python and PyTorch is called.
struct Python {
  int (*read)(void *tensor, Tensor *found);     // DLPackDLTensorFromPyObjectNoSync
  void (*clear)(void);                          // PyErr_Clear
  void *(*save)(void);                          // PyEval_SaveThread
  void (*restore)(void *);                      // PyEval_RestoreThread
  void *(*attribute)(void *object, void *name); // PyObject_GetAttr
  i64 (*number)(void *);                        // PyLong_AsLongLong
  void (*drop)(void *);                         // Py_DecRef
  void *(*ask)(void *function, ...);            // PyObject_CallFunctionObjArgs
  void *is_negated, *no, *version;              // torch.is_neg, False, "_version"
  i64 items, data;                              // bytes before a tuple's items, and before an array's address
};

// Arguments that must be the same tensors, of the same version, in the same memory.
struct Watched {
  i64 count;
  const i64 *positions;
  void *const *objects, *const *memory;
  const i64 *versions;
};

// What an argument must be like.
struct Want {
  i64 type, rank;
  const i64 *shape;
};

// All that a call needs to know for arguments of one set of shapes.
struct Site {
  const Python *python;
  const Watched *watched;
  int (*run)(void *model, int threads, void *const *buffers, const i64 *dims, void *error); // ox_call
  void *model;
  const i64 *dims;
  i64 inputs, empty, outputs; // arguments that the program reads, inputs that have no elements, outputs
  const i64 *reads;           // positions of the arguments
  const Want *want;
};

struct Error { // ox_error
  int claimed, code;
  i64 node, value;
};

enum { UNFIT = -1, CHANGED = -2, MOST = 1024, CPU = 1 };
static __thread Error error_of_thread;

// The failure of this thread's last call.
EXPORT void last_error(Error *error) { *error = error_of_thread; }

static void *item_of(const Python *p, const char *tuple, i64 k) { return ((void *const *)(tuple + p->items))[k]; }
static i64 type_of(const Tensor *t) { return t->code | t->bits << 8 | (i64)t->lanes << 16; }

static int read(const Python *p, void *object, Tensor *found) {
  if (!p->read(object, found)) return 1;
  p->clear();
  return 0;
}

static int unchanged(const Python *p, const Watched *w, const char *args) {
  for (i64 k = 0; k < w->count; k++)
    if (item_of(p, args, w->positions[k]) != w->objects[k]) return 0;
  for (i64 k = 0; k < w->count; k++) {
    Tensor t;
    if (!read(p, w->objects[k], &t) || t.data + t.offset != w->memory[k]) return 0;
    void *version = p->attribute(w->objects[k], p->version);
    if (!version) { p->clear(); return 0; }
    i64 now = p->number(version);
    p->drop(version);
    if (now != w->versions[k]) return 0;
  }
  return 1;
}

// Row by row without gaps.
static int is_plain(const Tensor *t) {
  i64 step = 1;
  for (int k = 0; k < t->rank; k++)
    if (!t->shape[k]) return 1;
  for (int k = t->rank; k-- > 0; step *= t->shape[k])
    if (t->shape[k] != 1 && t->strides && t->strides[k] != step) return 0;
  return 1;
}

static int fits(const Tensor *t, const Want *want) {
  if (t->device != CPU || type_of(t) != want->type || t->rank != want->rank) return 0;
  int any = 1;
  for (int k = 0; k < t->rank; k++) {
    if (t->shape[k] != want->shape[k]) return 0;
    any = any && t->shape[k];
  }
  if (any && !t->data) return 0; // PyTorch's derivatives have zeros without memory
  return is_plain(t) && !((unsigned long long)(t->data + t->offset) % (t->bits / 8 ? t->bits / 8 : 1));
}

// Whether its elements stand for what they are without a sign.
static int is_negated(const Python *p, void *tensor) {
  void *found = p->ask(p->is_negated, tensor, (void *)0);
  if (!found) { p->clear(); return 1; }
  int negated = found != p->no;
  p->drop(found);
  return negated;
}

// What is found of a tuple's first item: whether it can be read, its type, address and rank; and whether it lies row
// by row on the CPU, as it is.
EXPORT void tensor_facts(const Python *p, const char *tuple, i64 *found) {
  void *object = item_of(p, tuple, 0);
  Tensor t;
  found[0] = read(p, object, &t);
  if (!found[0]) return;
  found[1] = type_of(&t), found[2] = (i64)(t.data + t.offset), found[3] = t.rank;
  found[4] = t.device == CPU && is_plain(&t) && !is_negated(p, object);
}

// The address of an array of numpy, a tuple's first item.
EXPORT i64 array_address(const Python *p, const char *tuple) {
  return *(const i64 *)((const char *)item_of(p, tuple, 0) + p->data);
}

// Runs a program on a tuple of arguments and a tuple of new arrays. UNFIT, and nothing is done, where an argument is
// not plainly what the site is for; CHANGED where one that is watched has changed; else as ox_call.
EXPORT int call_tensors(const Site *s, int threads, const char *args, const char *outputs) {
  const Python *p = s->python;
  static char nothing[64];
  void *buffers[MOST];
  if (s->inputs + s->empty + s->outputs > MOST) return UNFIT;
  if (s->watched && !unchanged(p, s->watched, args)) return CHANGED;
  i64 at = 0;
  for (; at < s->inputs; at++) {
    void *object = item_of(p, args, s->reads[at]);
    Tensor t;
    if (!read(p, object, &t) || !fits(&t, &s->want[at]) || is_negated(p, object)) return UNFIT;
    buffers[at] = t.data + t.offset;
  }
  for (i64 k = 0; k < s->empty; k++) buffers[at++] = nothing;
  for (i64 k = 0; k < s->outputs; k++) buffers[at++] = *(void **)((char *)item_of(p, outputs, k) + p->data);
  void *state = p->save();
  int code = s->run(s->model, threads, buffers, s->dims, &error_of_thread);
  p->restore(state);
  return code;
}
