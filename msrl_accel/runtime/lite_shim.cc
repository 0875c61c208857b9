// C interface over mindspore::Model, for ctypes. MindSpore Lite 2.0 was built with the old
// libstdc++ ABI: compile with -D_GLIBCXX_USE_CXX11_ABI=0. Status codes are returned as they are
// (0 is success); the engine writes what went wrong to the standard error stream.
#include <sched.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "include/api/context.h"
#include "include/api/model.h"
#include "include/registry/converter_context.h"

namespace mindspore {

// The wheel holds the converter without its header; these are the parts of the public class
// (mindspore/lite/include/converter.h of release 2.0) that are used here.
struct ConverterPara;
class Converter {
 public:
  Converter();
  void SetSaveType(ModelType type);
  void SetInputFormat(Format format);
  Status Convert(converter::FmkType from, const std::vector<char> &model,
                 const std::vector<char> &output, const std::vector<char> &weights);

 private:
  std::shared_ptr<ConverterPara> data_;
};

}  // namespace mindspore

namespace {

constexpr int kTensorDiffers = -1;
constexpr int kAnyCore = -1;

// Keeps the calling thread on a core while it lives. Lite hands each graph to a thread of its own:
// between two cores that takes three times as long as a small graph. Lite would leave the caller
// pinned for ever; here its own cores are given back.
class OnOneCore {
 public:
  explicit OnOneCore(int core) {
    if (core == kAnyCore || sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    if (!CPU_ISSET(core, &before_)) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    pinned_ = sched_setaffinity(0, sizeof(one), &one) == 0;
  }
  ~OnOneCore() {
    if (pinned_) sched_setaffinity(0, sizeof(before_), &before_);
  }

 private:
  cpu_set_t before_;
  bool pinned_ = false;
};

// The caller's memory of one tensor.
struct Place {
  void *data;
  size_t size;
};

struct Engine {
  int core = kAnyCore;
  std::shared_ptr<mindspore::Context> context = std::make_shared<mindspore::Context>();
  mindspore::Model model;
  std::vector<mindspore::MSTensor> inputs;
  std::vector<mindspore::MSTensor> outputs;
  std::vector<Place> sources;  // one for each input
  std::vector<Place> targets;  // one for each output; none before the first prediction
};

}  // namespace

extern "C" {

// The engine of a model held in memory, or null. `type` is a mindspore::ModelType.
Engine *lite_open(const void *data, size_t size, int type, int threads) {
  auto engine = std::make_unique<Engine>();
  if (threads == 1) engine->core = sched_getcpu();
  engine->context->SetThreadNum(threads);
  engine->context->SetInterOpParallelNum(1);  // small graphs lose more than they gain by it
  OnOneCore pinned(engine->core);
  if (engine->core != kAnyCore) engine->context->SetThreadAffinity(std::vector<int>{engine->core});
  engine->context->MutableDeviceInfo().push_back(std::make_shared<mindspore::CPUDeviceInfo>());
  auto kind = static_cast<mindspore::ModelType>(type);
  auto status = engine->model.Build(data, size, kind, engine->context);
  if (status != mindspore::kSuccess) return nullptr;
  engine->inputs = engine->model.GetInputs();
  return engine.release();
}

void lite_close(Engine *engine) { delete engine; }

// Sets the shape of every input: `dims` holds the dimensions of all, `ranks` how many each has.
int64_t lite_resize(Engine *engine, const int64_t *dims, const int *ranks) {
  engine->sources.clear();
  engine->targets.clear();
  std::vector<std::vector<int64_t>> shapes;
  for (size_t i = 0; i < engine->inputs.size(); i++) {
    shapes.emplace_back(dims, dims + ranks[i]);
    dims += ranks[i];
  }
  auto status = engine->model.Resize(engine->inputs, shapes);
  engine->inputs = engine->model.GetInputs();
  return status.StatusCode();
}

// Where lite_run takes the inputs from (output = 0) or puts the outputs (output = 1), until the
// next resize; the memory is the caller's.
void lite_bind(Engine *engine, int output, int count, void *const *data, const size_t *sizes) {
  auto &places = output ? engine->targets : engine->sources;
  places.clear();
  for (int i = 0; i < count; i++) places.push_back({data[i], sizes[i]});
}

// Copies the outputs of the last prediction to their places.
int64_t lite_read(Engine *engine) {
  if (engine->targets.size() != engine->outputs.size()) return kTensorDiffers;
  for (size_t i = 0; i < engine->targets.size(); i++) {
    auto &tensor = engine->outputs[i];
    if (tensor.DataSize() != engine->targets[i].size) return kTensorDiffers;
    std::memcpy(engine->targets[i].data, tensor.Data().get(), engine->targets[i].size);
  }
  return 0;
}

// Computes the outputs, and copies them to their places where these are known.
int64_t lite_run(Engine *engine) {
  OnOneCore pinned(engine->core);
  if (engine->sources.size() != engine->inputs.size()) return kTensorDiffers;
  for (size_t i = 0; i < engine->inputs.size(); i++) {
    auto &tensor = engine->inputs[i];
    if (tensor.DataSize() != engine->sources[i].size) return kTensorDiffers;
    std::memcpy(tensor.MutableData(), engine->sources[i].data, engine->sources[i].size);
  }
  engine->outputs.clear();
  auto status = engine->model.Predict(engine->inputs, &engine->outputs);
  if (status != mindspore::kSuccess || engine->targets.empty()) return status.StatusCode();
  return lite_read(engine);
}

// Number of inputs (output = 0) or of outputs of the last prediction (output = 1).
int lite_count(Engine *engine, int output) {
  return static_cast<int>(output ? engine->outputs.size() : engine->inputs.size());
}

// Data type of a tensor, and its rank; up to `capacity` dimensions go to `dims`.
int lite_describe(Engine *engine, int output, int index, int64_t *dims, int capacity, int *rank) {
  auto &tensor = output ? engine->outputs[index] : engine->inputs[index];
  auto shape = tensor.Shape();
  *rank = static_cast<int>(shape.size());
  for (int i = 0; i < *rank && i < capacity; i++) dims[i] = shape[i];
  return static_cast<int>(tensor.DataType());
}

// Converts a MindIR file to `target`.ms.
int64_t lite_convert(const char *source, const char *target) {
  auto chars = [](const char *text) { return std::vector<char>(text, text + std::strlen(text)); };
  mindspore::Converter converter;
  converter.SetSaveType(mindspore::kMindIR_Lite);
  converter.SetInputFormat(mindspore::NCHW);  // which leaves images as the graph takes them
  auto from = mindspore::converter::kFmkTypeMs;
  return converter.Convert(from, chars(source), chars(target), {}).StatusCode();
}

}  // extern "C"
