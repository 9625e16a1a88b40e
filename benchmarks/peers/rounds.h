/* Rounds of a reshard, timed and checked, for programs that define fill(), move() and wrong().
 *
 * Elements are int32 and hold their own linear index plus a number that changes with every round. The first
 * round warms up and does not count, unless it takes more than SLOW seconds: then it is the only one. Rank 0
 * prints {"seconds": [...], "busy": [...], "wrong_elements": n}.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank;

static void fill(int32_t salt);     /* what is sent gets the values of the round, what is received others */
static void move(void);             /* all of it, once */
static int64_t wrong(int32_t salt); /* elements on this rank */

static void fail(const char* what) {
  fprintf(stderr, "reshard: %s\n", what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Seconds that the machine's cores have worked, and that they had. */
static void cores(double* worked, double* had) {
  unsigned long long f[8] = {0};
  FILE* file = fopen("/proc/stat", "r");
  if (!file || fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &f[0], &f[1], &f[2], &f[3], &f[4],
                      &f[5], &f[6], &f[7]) != 8)
    fail("cannot read /proc/stat");
  fclose(file);
  *had = 0;
  for (int i = 0; i < 8; ++i) *had += (double)f[i];
  *worked = *had - (double)(f[3] + f[4]);
}

static void rounds(int repeats, double slow) {
  int64_t mine = 0, total = 0;
  int first = 1; /* of the rounds that count */
  double *seconds = calloc((size_t)repeats + 1, sizeof(double)),
         *busy = calloc((size_t)repeats + 1, sizeof(double));
  for (int round = 0; round <= repeats; ++round) {
    fill(round);
    double worked, had, worked_after, had_after;
    MPI_Barrier(MPI_COMM_WORLD);
    cores(&worked, &had);
    const double start = MPI_Wtime();
    move();
    const double taken = MPI_Wtime() - start; /* the slowest rank counts */
    MPI_Allreduce(&taken, &seconds[round], 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    cores(&worked_after, &had_after);
    busy[round] = had_after > had ? (worked_after - worked) / (had_after - had) : 0;
    mine += wrong(round);
    if (round == 0 && seconds[0] > slow) repeats = first = 0; /* the same on all ranks */
  }
  MPI_Reduce(&mine, &total, 1, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank != 0) return;
  printf("{\"seconds\": [");
  for (int i = first; i <= repeats; ++i) printf("%s%.6f", i > first ? ", " : "", seconds[i]);
  printf("], \"busy\": [");
  for (int i = first; i <= repeats; ++i) printf("%s%.3f", i > first ? ", " : "", busy[i]);
  printf("], \"wrong_elements\": %ld}\n", total);
  fflush(stdout);
}
