// Each run is a child process. A fault ends it, and the message that it wrote to stderr becomes the caller's report.
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "inside.hpp"
#include "machine.hpp"
#include "target/host.cuh"

namespace host {

void fail(const char* format, ...) {
  char text[4608];
  int length = snprintf(text, sizeof(text), "block %d, ", blocks[rank].index);
  if (running >= 0) {
    length += snprintf(text + length, sizeof(text) - length, "thread %d: ", running);
  } else if (launch.cluster > 1) {
    length = snprintf(text, sizeof(text), "blocks %d to %d, ", blocks.front().index, blocks.back().index);
  }
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + length, sizeof(text) - length, format, arguments);
  va_end(arguments);
  dprintf(STDERR_FILENO, "%s\n", text);
  _exit(1);
}

int run(const Launch& asked, char* report, int report_bytes) {
  int ends[2];
  // O_CLOEXEC: a compiler that another thread starts meanwhile must not inherit the writing end, or reading the report
  // would not end before that compiler exits.
  if (asked.threads % asked.wave != 0 || asked.grid % asked.cluster != 0 || pipe2(ends, O_CLOEXEC) != 0) {
    snprintf(report, report_bytes, "cannot launch %d threads in waves of %d, %d blocks in clusters of %d",
             asked.threads, asked.wave, asked.grid, asked.cluster);
    return 1;
  }
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    launch = asked;
    run_grid();
    _exit(0);
  }
  close(ends[1]);
  int length = 0;
  for (ssize_t got; (got = read(ends[0], report + length, report_bytes - 1 - length)) > 0;) length += got;
  report[length] = '\0';
  close(ends[0]);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) < 0) {
    snprintf(report, report_bytes, "no child process");
    return 1;
  }
  if (WIFSIGNALED(status)) snprintf(report + length, report_bytes - length, "ended by signal %d", WTERMSIG(status));
  return status != 0;
}

}  // namespace host
