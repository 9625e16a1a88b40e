/* The orders of calls/rounds.py, for programs that exchange messages: each defines one(), batch() and prepared().
 *
 * A line is WHAT BYTES WINDOW COUNT KIND, where WHAT is check, latency or stream. A rank first says its number;
 * it answers a check with "right", and the others with the seconds and the CPU seconds that they took.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int rank, window;
static long bytes;
static int *mine, **outs; /* one buffer to send from; as many to receive into as messages are in flight */

static void one(int sender); /* a message from rank `sender` to the other */
static void batch(void);     /* a window of messages from rank 0 to rank 1, all in flight at once */
static void forget(void);    /* before the buffers are freed */

static double seconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void prepare(void) {
  static int had;
  forget();
  for (int i = 0; i < had; ++i) free(outs[i]);
  free(outs);
  free(mine);
  mine = malloc((size_t)bytes);
  for (long i = 0; i < bytes / 4; ++i) mine[i] = (int)i + rank;
  had = rank == 1 ? window : 1;
  outs = malloc(sizeof *outs * (size_t)had);
  for (int i = 0; i < had; ++i) memset(outs[i] = malloc((size_t)bytes), 0, (size_t)bytes);
}

static int right(void) {
  for (int o = 0; o < (rank == 1 ? window : 1); ++o)
    for (long i = 0; i < bytes / 4; ++i)
      if (outs[o][i] != (int)i + 1 - rank) return 0;
  return 1;
}

/* Carries out one order after the other until there are no more. Answers whether it could connect. */
static int serve(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(fd, (struct sockaddr*)&address, sizeof address) != 0) return 0;
  FILE* in = fdopen(fd, "r");
  dprintf(fd, "%d\n", rank);
  char what[16];
  int count;
  while (fscanf(in, "%15s %ld %d %d %*s", what, &bytes, &window, &count) == 4) {
    if (strcmp(what, "check") == 0) {
      prepare();
      for (int i = 0; i < 2; ++i) one(0), one(1), batch();
      one(1); /* so that both have all */
      dprintf(fd, right() ? "right\n" : "wrong values\n");
      continue;
    }
    one(0), one(1); /* begins when both are here */
    const double begin = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_PROCESS_CPUTIME_ID);
    if (strcmp(what, "latency") == 0) {
      for (int i = 0; i < count; ++i) one(0), one(1);
    } else {
      for (int i = 0; i < count; ++i) batch();
      one(1); /* so that rank 0 ends when all has arrived */
    }
    const double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - used;
    dprintf(fd, "%.9f %.9f\n", seconds(CLOCK_MONOTONIC) - begin, cpu);
  }
  fclose(in);
  return 1;
}
