# docker build -t card . && docker run --rm -e CARD_API_KEY=secret -p 127.0.0.1:8000:8000 -v card:/home/card/.cache card
# Other machines and containers reach what listens in a container, so the server refuses to start without a key.
# deploy/compose.yaml does the same, and starts it again after a failure.
FROM python:3.13-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir -c /src/constraints.txt -w /wheels "/src[serve]"

FROM python:3.13-slim
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-index -f /wheels "card-decoding[serve]" \
    && useradd --create-home card && install -d -o card -g card -m 700 /home/card/.cache
USER card
WORKDIR /home/card
# Machine code, packed weights and downloads: without them each start compiles, packs and fetches once more.
VOLUME /home/card/.cache
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["card", "serve", "--host", "0.0.0.0"]
CMD ["--target", "demo-target", "--draft", "demo-draft"]
