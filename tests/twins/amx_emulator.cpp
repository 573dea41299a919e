#include "amx_emulator.h"

#include "kernels/cpu_features.h"

#if defined(__x86_64__) && defined(__linux__)
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstring>

namespace w4a8::test {
namespace {

// Not returned from: the signal is blocked in its own handler, so this ends the process.
void fault_unless(bool valid) {
  if (!valid) __builtin_trap();
}

constexpr int kTiles = 8;
constexpr int kMostRows = 16;
constexpr int kMostBytes = 64;

struct Tile {
  int rows;
  int bytes;
  uint8_t data[kMostRows][kMostBytes];
};

struct State {
  bool configured;
  Tile tiles[kTiles];
};

thread_local State t_state;
std::atomic<int64_t> g_count{0};

// Places of emulated instructions: a hash table that a signal handler can write.
constexpr std::size_t kPlaces = 4096;
std::atomic<uintptr_t> g_places[kPlaces];

void note_place(uintptr_t place) {
  for (std::size_t i = place % kPlaces, tries = 0; tries < kPlaces; i = (i + 1) % kPlaces, ++tries) {
    uintptr_t old = g_places[i].load(std::memory_order_relaxed);
    if (old == 0 && g_places[i].compare_exchange_strong(old, place, std::memory_order_relaxed)) return;
    if (old == place) return;
  }
  fault_unless(false);  // full: more instructions than any kernel has
}
struct sigaction g_before;

// VEX.128.0F38.W0, the map of all of AMX: C4, ~R~X~B map with R 0, W ~vvvv L pp, opcode, ModRM, and for memory SIB and
// offset.
struct Instruction {
  int prefix;  // 0: none, 1: 66, 2: F3, 3: F2
  int opcode;
  int mod;
  int reg;
  int rm;
  int vvvv;
  uint8_t* base;   // of an operand in memory, with its offset
  int64_t stride;  // its index register, scaled
  int length;
};

int64_t general_register(const ucontext_t& context, int number) {
  static constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kOrder[number]];
}

// False for what is not of that form.
bool decode(const ucontext_t& context, Instruction& result) {
  const auto* code = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  if (code[0] != 0xc4 || (code[1] & 0x9f) != 0x82 || (code[2] & 0x84) != 0) return false;
  const int x = (code[1] & 0x40) != 0 ? 0 : 8;
  const int b = (code[1] & 0x20) != 0 ? 0 : 8;
  const int modrm = code[4];
  result = {code[2] & 3, code[3], modrm >> 6, (modrm >> 3) & 7, modrm & 7, ~(code[2] >> 3) & 15, nullptr, 0, 5};
  if (result.mod == 3) return true;
  int64_t address = 0;
  bool offset32 = result.mod == 2;
  bool from_next = false;
  if (result.rm == 4) {
    const int sib = code[result.length++];
    const int index = ((sib >> 3) & 7) | x;
    if (index != 4) result.stride = general_register(context, index) * (1 << (sib >> 6));
    if ((sib & 7) == 5 && result.mod == 0) {
      offset32 = true;
    } else {
      address = general_register(context, (sib & 7) | b);
    }
  } else if (result.rm == 5 && result.mod == 0) {
    offset32 = from_next = true;
  } else {
    address = general_register(context, result.rm | b);
  }
  if (offset32) {
    int32_t offset;
    std::memcpy(&offset, code + result.length, sizeof(offset));
    address += offset;
    result.length += 4;
  } else if (result.mod == 1) {
    address += static_cast<int8_t>(code[result.length++]);
  }
  if (from_next) address += context.uc_mcontext.gregs[REG_RIP] + result.length;
  result.base = reinterpret_cast<uint8_t*>(address);  // NOLINT(performance-no-int-to-ptr)
  return true;
}

// Palette 1; everything that it does not use is zero.
void configure(State& state, const uint8_t* config) {
  fault_unless(config[0] == 1 && config[1] == 0);
  for (int i = 2; i < 16; ++i) fault_unless(config[i] == 0);
  for (int t = 0; t < 16; ++t) {
    const int bytes = config[16 + 2 * t] | config[17 + 2 * t] << 8;
    const int rows = config[48 + t];
    fault_unless(bytes <= kMostBytes && rows <= kMostRows && (bytes == 0) == (rows == 0));
    fault_unless(t < kTiles || bytes == 0);
    if (t < kTiles) state.tiles[t] = {rows, bytes, {}};
  }
  state.configured = true;
}

Tile& configured_tile(State& state, int number) {
  fault_unless(state.configured && number < kTiles && state.tiles[number].rows != 0);
  return state.tiles[number];
}

// c[m, n] += sum of a[m, 4 k + i] * b[k, 4 n + i], int8 both. Tiles are a thread's own: ThreadSanitizer would find
// nothing here, and spend most of its time.
__attribute__((no_sanitize("thread"))) void multiply(Tile& c, const Tile& a, const Tile& b) {
  fault_unless(&a != &b && &a != &c && &b != &c);
  fault_unless(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows);
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.bytes / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, &c.data[m][4 * n], sizeof(sum));
      for (int k = 0; k < a.bytes; ++k) {
        const int product = static_cast<int8_t>(a.data[m][k]) * static_cast<int8_t>(b.data[k / 4][4 * n + k % 4]);
        sum += static_cast<uint32_t>(product);
      }
      std::memcpy(&c.data[m][4 * n], &sum, sizeof(sum));
    }
  }
}

// False for an instruction that is not AMX's, or that no kernel uses.
bool execute(const Instruction& instruction, State& state) {
  const bool memory = instruction.mod != 3;
  switch (instruction.opcode << 8 | instruction.prefix) {
    case 0x4900:  // LDTILECFG, TILERELEASE
      if (instruction.reg != 0 || (!memory && instruction.rm != 0)) return false;
      if (memory) {
        configure(state, instruction.base);
      } else {
        state.configured = false;
      }
      return true;
    case 0x4903: {  // TILEZERO
      if (memory || instruction.rm != 0) return false;
      Tile& tile = configured_tile(state, instruction.reg);
      std::memset(tile.data, 0, sizeof(tile.data));
      return true;
    }
    case 0x4b03: {  // TILELOADD
      if (!memory || instruction.rm != 4) return false;
      Tile& tile = configured_tile(state, instruction.reg);
      std::memset(tile.data, 0, sizeof(tile.data));
      for (int r = 0; r < tile.rows; ++r) {
        std::memcpy(tile.data[r], instruction.base + r * instruction.stride, static_cast<std::size_t>(tile.bytes));
      }
      return true;
    }
    case 0x4b02: {  // TILESTORED
      if (!memory || instruction.rm != 4) return false;
      const Tile& tile = configured_tile(state, instruction.reg);
      for (int r = 0; r < tile.rows; ++r) {
        std::memcpy(instruction.base + r * instruction.stride, tile.data[r], static_cast<std::size_t>(tile.bytes));
      }
      return true;
    }
    case 0x5e03:  // TDPBSSD
      if (memory) return false;
      multiply(configured_tile(state, instruction.reg), configured_tile(state, instruction.rm),
               configured_tile(state, instruction.vvvv));
      return true;
    default: return false;
  }
}

void handle(int, siginfo_t*, void* raw) {
  auto& context = *static_cast<ucontext_t*>(raw);
  Instruction instruction;
  int64_t count = 0;
  // Often one follows another: signals are what takes time.
  for (; decode(context, instruction) && execute(instruction, t_state); ++count) {
    note_place(static_cast<uintptr_t>(context.uc_mcontext.gregs[REG_RIP]));
    context.uc_mcontext.gregs[REG_RIP] += instruction.length;
  }
  g_count.fetch_add(count, std::memory_order_relaxed);
  if (count == 0) sigaction(SIGILL, &g_before, nullptr);  // the instruction is tried again
}

}  // namespace

bool emulate_amx() {
  static const bool installed = [] {
    ask_for_amx();  // who has AMX is to use it
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGILL, &action, &g_before) == 0;
  }();
  return installed;
}

int64_t emulated_amx_instructions() { return g_count; }

std::set<const void*> take_emulated_amx_places() {
  std::set<const void*> places;
  for (std::atomic<uintptr_t>& entry : g_places) {
    const uintptr_t place = entry.exchange(0);
    if (place != 0) places.insert(reinterpret_cast<const void*>(place));  // NOLINT(performance-no-int-to-ptr)
  }
  return places;
}

}  // namespace w4a8::test

#else
namespace w4a8::test {
bool emulate_amx() { return false; }
int64_t emulated_amx_instructions() { return 0; }
std::set<const void*> take_emulated_amx_places() { return {}; }
}  // namespace w4a8::test
#endif
