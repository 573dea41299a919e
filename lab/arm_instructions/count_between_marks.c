/* QEMU plugin: counts the instructions a program executes between two marks, and how many of them multiply int8.
 *
 *   HINT #100  begins an interval, HINT #101 ends it (both do nothing on a CPU). At exit one line per interval:
 *   <instructions> <SMMLA> <SDOT> <SMULL, SMLAL and their halves>
 *
 * Each instruction has its own inline counter, so an interval need not begin or end with a translation block.
 * gcc -O2 -shared -fPIC count_between_marks.c -o count.so
 * qemu-aarch64 -cpu max -plugin ./count.so,out=counts.txt PROGRAM       (not qemu-user-static: it loads no plugins)
 * The declarations are those of qemu-plugin.h, API version 1, which Debian does not package. One thread only. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { kInlineAddU64 = 0, kCallbackReadsNoRegisters = 0 };
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* tb);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb* tb, size_t index);
const void* qemu_plugin_insn_data(const struct qemu_plugin_insn* insn);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
                                           void (*callback)(qemu_plugin_id_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn* insn, int op, void* counter, uint64_t value);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn* insn, void (*callback)(unsigned, void*), int flags,
                                            void* data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, void*), void* data);

enum Class { kAll, kSmmla, kSdot, kSmlal, kClasses };

static uint64_t counters[kClasses];
static uint64_t at_begin[kClasses];
static FILE* report;

/* Arm ARM, C7.2: SMMLA (vector); SDOT (vector) and (by element); SMULL, SMLAL of bytes, lower and upper half. */
static enum Class class_of(uint32_t word) {
  if ((word & 0xffe0fc00) == 0x4e80a400) return kSmmla;
  if ((word & 0xbfe0fc00) == 0x0e809400 || (word & 0xbfc0f400) == 0x0f80e000) return kSdot;
  if ((word & 0xbfe0fc00) == 0x0e208000 || (word & 0xbfe0fc00) == 0x0e20c000) return kSmlal;
  return kAll;
}

static void begin_interval(unsigned cpu, void* data) {
  (void)cpu;
  (void)data;
  memcpy(at_begin, counters, sizeof(counters));
}

static void end_interval(unsigned cpu, void* data) {
  (void)cpu;
  (void)data;
  /* The beginning mark itself was counted behind its callback. */
  fprintf(report, "%" PRIu64, counters[kAll] - at_begin[kAll] - 1);
  for (int c = kSmmla; c < kClasses; ++c) fprintf(report, " %" PRIu64, counters[c] - at_begin[c]);
  fputc('\n', report);
}

static void translate(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
  (void)id;
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); ++i) {
    struct qemu_plugin_insn* insn = qemu_plugin_tb_get_insn(tb, i);
    uint32_t word;
    memcpy(&word, qemu_plugin_insn_data(insn), sizeof(word));
    if (word == (0xd503201f | 100 << 5))
      qemu_plugin_register_vcpu_insn_exec_cb(insn, begin_interval, kCallbackReadsNoRegisters, NULL);
    if (word == (0xd503201f | 101 << 5))
      qemu_plugin_register_vcpu_insn_exec_cb(insn, end_interval, kCallbackReadsNoRegisters, NULL);
    qemu_plugin_register_vcpu_insn_exec_inline(insn, kInlineAddU64, &counters[kAll], 1);
    const enum Class kind = class_of(word);
    if (kind != kAll) qemu_plugin_register_vcpu_insn_exec_inline(insn, kInlineAddU64, &counters[kind], 1);
  }
}

static void finish(qemu_plugin_id_t id, void* data) {
  (void)id;
  (void)data;
  fclose(report);
}

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int argc,
                                                               char** argv) {
  (void)info;
  for (int i = 0; i < argc; ++i) {
    if (strncmp(argv[i], "out=", 4) == 0) report = fopen(argv[i] + 4, "w");
  }
  if (report == NULL) {
    fputs("count_between_marks: needs out=PATH that can be written\n", stderr);
    return 1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
  qemu_plugin_register_atexit_cb(id, finish, NULL);
  return 0;
}
